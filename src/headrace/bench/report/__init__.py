"""What a comparison says: figures, verdict, pictures, all made of its records. A web page that needs nothing else.

figures    everything that is told, computed from a directory; `recheck` computes it again; pure but for reading
terminal   one screen of it; pure
rows       all of it as rows of a table; pure
pictures   plots, as SVG that takes the page's colours
page       the page
writing    the files
against    two comparisons beside each other
"""
