"""Callers and their rights. A service passes in its roles, its actions and the fields of its audit
as types.

principal      a caller with its roles and tenants
policy         the policy file: whose tokens have which roles for which tenants
authenticator  finds a call's principal by the token in its metadata
audit          one JSON line per requested change, granted or not
"""
