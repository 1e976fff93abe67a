"""The beginning of `txnkv` and of `python -m txnkv`: the version at once, all else by `cli`."""

import sys

from txnkv import __version__


def main() -> None:
    """Run the command that the arguments of the process name."""
    if sys.argv[1:] == ["--version"]:  # asked in scripts: it waits for no module
        print(f"txnkv, version {__version__}")
        return
    import signal

    try:
        from txnkv.cli import main as run

        run(prog_name="txnkv")
    except KeyboardInterrupt:  # so early that no command took it
        sys.exit(130)
    finally:  # The command has ended: a Ctrl-C while the process clears up changes nothing of it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
