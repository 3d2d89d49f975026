"""Layouts and images, as both ends of a pull mean them.

dtypes         element types
segment_kinds  the contents that an adapter may have for a target, and their names for people
targets        the weights of a base model that adapters may change
layouts        the targets of a base model, in order of use
layout_rules   checks a layout, and limits its size
header         an image's header and segments, and the messages of a pull
sharing        how a store hands an image to a service on the same machine
expert_index   where each expert's matrix lies in a segment of experts
rules          checks an image: in the store when it is planned, in the server when it arrives
"""
