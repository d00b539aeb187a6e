"""Kafka: the one loop, the lanes it feeds, publishing, tailing. Also the embedded broker's jar list (pom.xml)."""
