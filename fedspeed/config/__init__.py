"""The settings of a run: plan, warm-up, stopping rules, presets, `Config` <-> TOML. Nothing here imports torch."""
