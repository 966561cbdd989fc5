#!/usr/bin/env bash
# Prints how many compile jobs this machine bears: one a core, and 1.5 GB of memory for each.
cores=$(nproc)
memory=$(awk '/MemAvailable/ {print int($2 / 1536 / 1024)}' /proc/meminfo)
jobs=$(( memory < cores ? memory : cores ))
echo $(( jobs > 0 ? jobs : 1 ))
