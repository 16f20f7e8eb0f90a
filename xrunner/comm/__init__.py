"""Messages and collective operations between ranks; only the runner and the profiler import it."""

