"""Rollout: sampling responses from the policy."""
