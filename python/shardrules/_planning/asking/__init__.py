"""Questions about columns: checks, explanations, budgets, diffs, sweeps, trees of shardings."""
