"""One pure function per engine: an instance of the plan becomes a LaunchSpec."""
