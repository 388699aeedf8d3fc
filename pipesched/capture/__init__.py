"""Any model to layers and stage bodies: its forward is recorded once, and replayed in parts."""
