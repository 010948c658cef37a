"""PaddlePaddle with an agent, as a test adds it: declaration, provider, and a stand-in of the package."""
