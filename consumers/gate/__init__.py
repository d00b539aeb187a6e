"""The gate: runs every submitted adapter on a real engine before anybody may approve it."""
