"""Native operators for CPUs, and products on packed weights; only xrunner.ops imports them."""

