"""Consumers: the processes that read Kafka and act. They meet on Kafka, never in Python."""
