"""The whole product on one machine: `make demo`."""
