from dit_repro.cli import main

main()
