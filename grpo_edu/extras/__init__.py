"""What a setting adds to plain GRPO: filters of the sampling, tools, dynamic sampling, masks of the loss."""
