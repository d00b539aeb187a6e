"""The contract: everything two processes must agree on. Pure: no door, no clock, no dice."""
