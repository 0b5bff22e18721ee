"""What is asked of columns: checks, explanations, budgets, diffs, sweeps, trees of shardings."""
