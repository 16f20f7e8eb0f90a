"""XSimulator: predicts step times, memory and throughput of a schedule without running it. The
scheduler, the report and the application import it."""
