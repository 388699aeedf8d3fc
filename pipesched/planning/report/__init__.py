"""Report: explains a plan and compares it with measured steps, as text, a picture or an HTML page."""
