"""XScheduler: finds the schedule of highest throughput within the limits, and proves how far it may
be from the best. The application and the report import it."""
