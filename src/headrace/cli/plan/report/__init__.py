"""What is shown of a plan.

told       its values, as JSON keeps them
terminal   one screen
pictures   plots
page       one page that needs nothing else
writing    the files
"""
