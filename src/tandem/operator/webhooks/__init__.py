"""Webhooks: conversion between versions and admission, and the certificate they serve with."""
