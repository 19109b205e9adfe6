"""What ``tinsmith doctor`` looks at: each check is one function, and none loads anything heavy."""
