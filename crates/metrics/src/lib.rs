//! The engine's figures as OpenMetrics text, and in sentences.
