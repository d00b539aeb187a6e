"""The doors: the only room that reads the environment, opens sockets or starts processes."""
