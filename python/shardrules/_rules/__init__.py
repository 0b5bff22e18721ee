"""Rules of paths and of logical names: patterns, dialects, matchers and resolvers."""
