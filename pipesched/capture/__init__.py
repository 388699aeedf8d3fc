"""From any model to layers and stage bodies: the forward is recorded once and replayed stage by stage."""
