"""Where workloads run. `local`: as processes of this machine, under `openrl up`."""
