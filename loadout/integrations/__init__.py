"""Other projects on Loadout: trainers, and engines that keep their own loading of adapters.

trl              TRL's asynchronous GRPO: it pushes policies to the store, and samples from every
                 replica; needs TRL
engine_settings  settings that the integrations of engines read from the environment
adapter_folders  adapters of the store as folders of plain LoRAs, for an engine on this machine
following        calls a function for every change of the catalog

The packages of the engines' integrations are under integrations/ of the repository.
"""
