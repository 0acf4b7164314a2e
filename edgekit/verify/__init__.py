"""Verify: does a bundle do on its devices what the float model does?"""
