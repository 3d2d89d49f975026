"""Who calls, and what they may do. The roles, their actions and what the audit notes are a
service's own, passed in as types.

principal      a caller with its roles and tenants
policy         the policy file: whose tokens have which roles for which tenants
authenticator  tells a call's principal from its metadata
audit          one JSON line per change that is asked for, granted or not
"""
