"""Refit: the policy's weights into the generation engines, moved by a plan and verified tensor by tensor."""
