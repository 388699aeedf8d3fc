"""Report: a plan explained and compared with measured steps, as text, a picture or a page."""
