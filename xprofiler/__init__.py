"""XProfiler: what one layer costs (paper section 3), measured or from the analytic roofline."""
