"""The physical limits of this machine, and of the link to another: bare loops that the fabric is compared with.

A room of its own inside `fabric`; the engine knows nothing of it. Four loops, each as small as it can be (native/):

    copies      scattered pages from one mapped memory into another, by one core
    wakes       a word or an eventfd to and fro between two processes
    streams     the same pages through a TCP connection, and eight bytes to and fro
    writes      the same pages by libfabric writes with an imm on each, and eight bytes to and fro

`placement` says which pages, `memories` of what, `records` what is told. `rates` measures in one call each, `links`
keeps a pair of processes standing for those who take turns between a loop and something else. The processes are `side`,
asked together by `pair`, spoken to in `wire`; endpoints that leave files are named by `names`. `loops` loads the native
module. Any process that is asked, of whatever room, answers by `answering`, is seen as `asked`, and both read `frames`.
Nothing heavy is loaded here.
"""
