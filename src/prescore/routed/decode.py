"""WIP"""
class RoutedIndex:
    pass
