"""Registration: from a caller's request to a durable record.

registrar      fetches or receives an adapter within its quota, checks, stores and records it
base_model     chooses the base model that an adapter is recorded for
signatures     checks Ed25519 signatures of digests against the keys that the policy trusts
rate_limit     limits how often each tenant may register
tenant_policy  quotas of tenants and trusted keys, as the policy file has them
"""
