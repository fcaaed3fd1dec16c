"""What the sessions in noxfile.py need: releases, environments, a demonstration, a report."""
