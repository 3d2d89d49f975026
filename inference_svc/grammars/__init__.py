"""The form that an answer must have: a JSON schema, a regular expression, choices, or a grammar.

Grammars are strangers' programs: they are compiled, and their masks computed, in sandboxed
processes, which bound their time and memory. The engine gets one mask for each token.

grammar     the form that a request asks for, as plain data
calls       calls of tools, alone or in place of a form, as a grammar
arguments   arguments of calls that are no JSON, by their schema
parts       texts and tokens of a grammar
thoughts    thoughts before a form, as a grammar
budget      a bound on the tokens of thoughts
vocabulary  the bytes of a model's tokens, which a grammar is matched with
schema_places  finds the part of a schema that is refused, leaves out idle keywords
compiling   turns a grammar into Lark, compiles and tries it
task        the program of these processes, which uses both
checks      compiles a request's grammar once before it runs, and remembers the verdict
lanes       processes that compute masks for running sequences
masks       the masks of running sequences, on the engine's side
"""
