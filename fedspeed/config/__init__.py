"""What a run is: plan, warm-up, stopping rules, presets, `Config` <-> TOML. Nothing here needs torch."""
