"""The isolation matrix: what one tenant tries against another, and the audit record that proves what came of it."""
