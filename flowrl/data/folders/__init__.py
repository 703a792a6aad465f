"""Folders: atomic and private folders, and the folders of models and datasets that a run reads.

Entry points: `write_atomically` (atomic_folder.py) writes a folder completely or not at all. `private_folder` and
`create_folder` (private_folder.py) create folders for temporary files, and remove those of killed processes, which
`process_stat` identifies. `find_model_problem` and `find_dataset_problem` (input_paths.py) check inputs. May import
`flowrl.config`.
"""
