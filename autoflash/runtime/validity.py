"""What a config must fulfil to be right on a device: one plain function per family.

Asked by the families while tuning and again by the exported module for neighbouring shapes.
"""
