"""The default knobs of each portable family: valid on every device the family supports."""
