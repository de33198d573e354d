"""The kernels of linear_recurrence and its backward, and their host code."""
