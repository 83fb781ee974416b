"""Adapters: small trained matrices beside frozen ones, in parameter trees and in the folders of Hugging Face PEFT."""
