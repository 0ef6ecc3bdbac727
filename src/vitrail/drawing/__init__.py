"""How everything that Vitrail draws looks: figures in one style, and HTML pages from one template."""
