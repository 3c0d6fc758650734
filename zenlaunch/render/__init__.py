"""One pure function per target: a plan becomes files. (The CLI writes them.)"""
