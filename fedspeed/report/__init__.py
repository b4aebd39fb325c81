"""Reports of runs: tables, statistics, figures, pages and exports, from the files of run directories. No torch."""
