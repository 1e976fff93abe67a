"""`python -m txnkv` is the command line."""

from txnkv.cli import main

main(prog_name="txnkv")
