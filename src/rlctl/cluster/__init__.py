"""Ray: starting or joining a cluster, placing workers on devices, calling them, and noticing when one dies."""
