from hacrl.cli import main

main()
