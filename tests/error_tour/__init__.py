"""The error tour: what can go wrong, and what the error says. `test_error_tour.py` raises each error of these tables."""
